export class ImagesView { constructor(){ this.element=document.createElement("div"); } update(){} }
